"""What a device reaches, kernel by kernel. Recorded and measured curves get the same fit, judged on held-out shapes."""
