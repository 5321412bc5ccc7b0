from jaxlib._jax import Client as Client
from jaxlib._jax import Device as Device
