"""The fleet on a virtual clock: policies side by side, scenarios, scale."""
