"""Simulation of a fleet with the service's own scheduling, placement and autoscaling code."""
