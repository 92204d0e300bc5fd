"""What `trimaran mcp` offers a coding assistant: the commands as typed tools, and the documentation."""
