"""A request's way from its body to its answer. ``pipeline`` shows it on one page."""
