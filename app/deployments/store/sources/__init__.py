"""Where adapters come from: folders, the hub, object stores and web servers, a downloader of your own."""
