"""Where adapters come from: folders, the hub, object stores, web servers, a custom fetcher."""
