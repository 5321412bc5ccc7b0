"""Object stores on the loopback for the tests, and a proxy that makes them fail."""
