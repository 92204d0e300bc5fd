"""Commands of this package: ui, report, viz and mcp."""
