"""What runs in an ingress: requests in words, placed and followed until they are answered."""
