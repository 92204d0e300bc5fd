"""Commands that start, change or end a run: train, launch, resume, replan, jobs and profile."""
