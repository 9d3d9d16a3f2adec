"""`model: "auto"`: the service chooses a request's adapter by what adapters say of themselves."""
