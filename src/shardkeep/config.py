"""Every setting of the library: its default, the environment variable that changes it, and the reason for both."""
