"""The JSON bodies of the HTTP API as pydantic types, one module per resource.

Routes, the OpenAPI document and the Python client share them, so this package imports only pydantic and the standard
library.
"""
