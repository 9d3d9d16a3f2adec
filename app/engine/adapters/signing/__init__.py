"""Who vouches for an adapter: keys, signatures, whom a tenant trusts."""
