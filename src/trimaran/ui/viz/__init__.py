"""Pictures that explain a plan or a run: what fits, who holds what, and who waits for whom."""
