"""The workers as the frontend sees them: models, connections, placement, metrics."""
