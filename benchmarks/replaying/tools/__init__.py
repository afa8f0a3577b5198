"""Ways of saving and resuming, each as a careful user would write it."""
