"""The worker among the others: its membership, who the others are, and which of them may act."""
