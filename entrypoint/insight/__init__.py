"""What boots and storage are like, measured and put into words."""
