class _Place:
    addr: int

def get_info(id: object) -> _Place: ...
