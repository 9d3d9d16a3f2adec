"""Placement policies, one file each with its options. `placement.policy` names the file."""
