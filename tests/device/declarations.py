"""The C header that the simulated device is compiled with, made from the ctypes declarations of `pypjrt`.

PJRT's own header is not part of any wheel of JAX. `pypjrt` has the same declarations for Python: the order of the
functions in a plugin's table, the structs of their arguments, the enums. ctypes knows pointers only as `void *`; what
they point to is written here, for the fields that the simulated device uses.
"""

import ctypes
import importlib
from types import ModuleType
from typing import Any

_OPAQUE = [  # each plugin defines its own
    *["Client", "Device", "DeviceDescription", "Memory", "Buffer", "Event", "Error"],
    *["Layouts_MemoryLayout", "Layouts_SerializedLayout"],
]

_NUMBERS = {
    ctypes.c_bool: "bool",
    ctypes.c_float: "float",
    ctypes.c_int: "int",
    ctypes.c_long: "int64_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_ulong: "size_t",
}
_POINTERS = {
    "PJRT_Client*": ["client"],
    "PJRT_Device*": ["device", "addressable_device", "dst_device"],
    "PJRT_Device* const*": ["devices", "addressable_devices"],
    "PJRT_DeviceDescription*": ["device_description"],
    "PJRT_Memory*": ["memory", "dst_memory"],
    "PJRT_Memory* const*": ["memories", "addressable_memories"],
    "PJRT_Buffer*": ["buffer", "src", "dst_buffer"],
    "PJRT_Buffer_MemoryLayout*": ["device_layout", "host_layout"],
    "PJRT_Layouts_MemoryLayout*": ["layout"],
    "PJRT_Layouts_SerializedLayout*": ["serialized_layout"],
    "PJRT_Layouts_Deleter": ["serialized_layout_deleter"],
    "PJRT_Event*": ["event", "done_with_host_buffer"],
    "PJRT_Event_Callback": ["callback"],
    "PJRT_Error*": ["error"],
    "const PJRT_NamedValue*": ["create_options"],
    "const int64_t*": ["dims", "unpadded_dims", "byte_strides", "minor_to_major"],
    "int*": ["default_assignment"],
    "const char*": [
        *["name", "message", "kind", "device_kind", "platform_name", "platform_version"],
        *["debug_string", "to_string", "serialized_bytes"],
    ],
}
_TYPE_OF = {field: type_ for type_, fields in _POINTERS.items() for field in fields}
_ENUMS = (
    *("PJRT_Error_Code_", "PJRT_Buffer_Type_", "PJRT_HostBufferSemantics_", "PJRT_Buffer_MemoryLayout_Type_"),
    "PJRT_Extension_Type_",
)
_RETURN_NOTHING = ["PJRT_Error_Destroy", "PJRT_Error_Message"]  # every other function returns a PJRT_Error*


def header() -> str:
    """Everything a plugin needs: enums, the structs of all arguments, `PJRT_Api`, and `PJRT_FOR_EACH_FUNCTION`.

    Raises ImportError where pypjrt is not installed.
    """
    abi = importlib.import_module("pypjrt._abi")
    major, minor = max(abi.available())
    declared: ModuleType = importlib.import_module(f"pypjrt._abi.pjrt_{major}_{minor}")
    functions: tuple[str, ...] = declared.FUNCTIONS
    lines = ["#pragma once", "#include <stddef.h>", "#include <stdint.h>"]
    lines += [f"struct PJRT_{name};" for name in _OPAQUE]
    lines += ["typedef void (*PJRT_Event_Callback)(PJRT_Error* error, void* user_arg);"]
    lines += ["typedef void (*PJRT_Layouts_Deleter)(PJRT_Layouts_SerializedLayout* layout);"]
    lines += _constants(declared)
    structs = _Structs()
    structs.declare(declared.PJRT_NamedValue)
    structs.declare(declared.PJRT_Buffer_MemoryLayout)
    for table in (declared.PJRT_Api, declared.PJRT_Layouts_Extension):
        structs.declare_table(declared, table)
    lines += structs.lines
    visited = " ".join(f"VISIT({name})" for name in functions if name not in _RETURN_NOTHING)
    return "\n".join([*lines, f"#define PJRT_FOR_EACH_FUNCTION(VISIT) {visited}", ""])


def _constants(declared: ModuleType) -> list[str]:
    def wanted(name: str) -> bool:
        return name.startswith(_ENUMS) or (name.startswith("PJRT_") and name.endswith("_STRUCT_SIZE"))

    return [f"constexpr uint32_t {name} = {value};" for name, value in vars(declared).items() if wanted(name)]


class _Structs:
    """Structs written as C, each once and after those it contains."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._written: set[str] = set()

    def declare(self, struct: Any) -> None:
        if struct.__name__ in self._written:
            return
        self._written.add(struct.__name__)
        fields = [self._field(struct, name, type_) for name, type_ in struct._fields_]
        self._write(struct, fields)

    def _write(self, struct: Any, fields: list[str]) -> None:
        self.lines += [f"struct {struct.__name__} {{ {' '.join(fields)} }};"]
        # The compiler of this machine must come to the layout that ctypes has.
        self.lines += [f"static_assert(sizeof({struct.__name__}) == {ctypes.sizeof(struct)});"]
        self.lines += [
            f"static_assert(offsetof({struct.__name__}, {name}) == {getattr(struct, name).offset});"
            for name, _ in struct._fields_
            if name not in getattr(struct, "_anonymous_", ())
        ]

    def declare_table(self, declared: ModuleType, table: Any) -> None:
        """A struct of functions, together with the structs of their arguments."""
        fields: list[str] = []
        for name, type_ in table._fields_:
            arguments = getattr(declared, f"{name}_Args", None)
            if arguments is None:
                fields += [self._field(table, name, type_)]
            else:
                self.declare(arguments)
                result = "void" if name in _RETURN_NOTHING else "PJRT_Error*"
                fields += [f"{result} (*{name})({arguments.__name__}* args);"]
        self._write(table, fields)

    def _field(self, struct: Any, name: str, type_: Any) -> str:
        if name in getattr(struct, "_anonymous_", ()):
            members = [self._field(type_, *member) for member in type_._fields_]
            return f"union {{ {' '.join(members)} }};"
        if type_ is ctypes.c_void_p:
            return f"{_TYPE_OF.get(name, 'void*')} {name};"
        if type_ in _NUMBERS:
            return f"{_NUMBERS[type_]} {name};"
        self.declare(type_)
        return f"{type_.__name__} {name};"
