"""What is kept for clients: files, batches of requests and their answers, responses."""
