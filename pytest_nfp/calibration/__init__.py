"""What a device reaches, kernel by kernel: one fit for recorded and for measured curves, held out by shape."""
