"""Training objectives and their losses. Losses are sums over tokens; the stepper divides once."""
