"""Commands about this machine: doctor, bench, calibrate and warm."""
