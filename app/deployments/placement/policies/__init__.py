"""Where an adapter may be served: a file per policy, with its options. `placement.policy` names the file."""
