"""Where a run can be launched: one module for each target, the site's defaults, and the record of launched jobs."""
