"""Vision-language networks: towers, projectors and their weights."""
