"""The demo tasks, and the scripts that train and measure the demo adapters."""
