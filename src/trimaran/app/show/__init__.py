"""What every command prints with: the console, progress, charts in text, and errors in two languages."""
