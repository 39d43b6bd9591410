"""How a verify pass is put to each attention backend."""
