"""Who may ask, how much, from which web pages, and what is written of it."""
