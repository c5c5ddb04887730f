"""What a worker tells of itself: events, load, metrics."""
