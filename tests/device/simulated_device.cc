// A simulated accelerator: a PJRT plugin whose devices have memory of their own, so that JAX must copy.
//
// Each device has the memories `device` and `pinned_host` and two transfer queues, one for each direction. A queue runs
// one transfer after another, in its own thread and at a settable rate. Transfers can be held. Every transfer is logged
// and counted. Nothing can be compiled: the plugin only stores and moves arrays.
//
// The environment sets it up (SIMULATED_PLATFORM, SIMULATED_DEVICES), and the functions at the end of this file control
// it while the program runs. tests/device/control.py calls them.

#include "machine.h"

// The functions of the plugin, in the order of PJRT's table.

#define FUNCTION(name) PJRT_Error* name([[maybe_unused]] PJRT_##name##_Args* args)

// A function whose only result is one field.
#define GETTER(name, field, value) \
  FUNCTION(name) {                 \
    args->field = value;           \
    return nullptr;                \
  }

#define TEXT_GETTER(name, field, value)   \
  FUNCTION(name) {                        \
    const std::string& text = value;      \
    args->field = text.c_str();           \
    args->field##_size = text.size();     \
    return nullptr;                       \
  }

#define LIST_GETTER(name, field, count, value) \
  FUNCTION(name) {                             \
    args->field = (value).data();              \
    args->count = (value).size();              \
    return nullptr;                            \
  }

void Error_Destroy(PJRT_Error_Destroy_Args* args) { delete args->error; }

void Error_Message(PJRT_Error_Message_Args* args) {
  args->message = args->error->message.c_str();
  args->message_size = args->error->message.size();
}

GETTER(Error_GetCode, code, args->error->code)
FUNCTION(Error_ForEachPayload) { return nullptr; }
FUNCTION(Plugin_Initialize) { return nullptr; }

FUNCTION(Plugin_Attributes) {
  args->num_attributes = 0;
  args->attributes = nullptr;
  return nullptr;
}

FUNCTION(Event_Destroy) {
  delete args->event;
  return nullptr;
}

GETTER(Event_IsReady, is_ready, args->event->promise->ready())
FUNCTION(Event_Error) { return args->event->promise->Error(); }
FUNCTION(Event_Await) { return args->event->promise->Wait(); }

FUNCTION(Event_OnReady) {
  PromisePtr promise = args->event->promise;
  promise->WhenReady([promise = promise.get(), callback = args->callback, user_arg = args->user_arg] {
    callback(promise->Error(), user_arg);
  });
  return nullptr;
}

FUNCTION(Client_Create) {
  auto* client = new PJRT_Client;
  client->platform = Setting("SIMULATED_PLATFORM", "simulated");
  int each = std::stoi(Setting("SIMULATED_DEVICES", "4")), processes = 1;
  for (size_t i = 0; i < args->num_options; i++) {
    const PJRT_NamedValue& option = args->create_options[i];
    std::string name(option.name, option.name_size);
    if (name == "node_id") client->process = option.int64_value;
    if (name == "num_nodes") processes = option.int64_value;
  }
  for (int id = 0; id < each * processes; id++) {
    int process = id / each;
    std::string text = client->platform + ":" + std::to_string(id);
    bool mine = process == client->process;
    auto* device = new PJRT_Device{{id, process, id % each, text}, mine, {}, {id, OUT}, {id, IN}};
    client->devices.push_back(device);
    if (!mine) continue;
    client->addressable.push_back(device);
    for (int place : {DEVICE, PINNED}) {
      std::string kind = kMemoryKinds[place];
      auto* memory = new PJRT_Memory{nullptr, 2 * id + place - DEVICE, place, kind, kind + " of " + text, device};
      device->memories.push_back(memory);
      client->memories.push_back(memory);
    }
  }
  args->client = client;
  return nullptr;
}

FUNCTION(Client_Destroy) { return nullptr; }  // threads may still use what it has
TEXT_GETTER(Client_PlatformName, platform_name, args->client->platform)
GETTER(Client_ProcessIndex, process_index, args->client->process)
TEXT_GETTER(Client_PlatformVersion, platform_version, args->client->platform)
LIST_GETTER(Client_Devices, devices, num_devices, args->client->devices)
LIST_GETTER(Client_AddressableDevices, addressable_devices, num_addressable_devices, args->client->addressable)
GETTER(Client_LookupDevice, device, args->client->devices.at(args->id))
GETTER(Client_LookupAddressableDevice, addressable_device, args->client->addressable.at(args->local_hardware_id))
LIST_GETTER(Client_AddressableMemories, addressable_memories, num_addressable_memories, args->client->memories)
FUNCTION(Client_UpdateGlobalProcessInfo) { return nullptr; }

FUNCTION(Client_DefaultDeviceAssignment) {
  for (size_t i = 0; i < args->default_assignment_size; i++) args->default_assignment[i] = i;
  return nullptr;
}

FUNCTION(Client_BufferFromHostBuffer) {
  static const char* const semantics[] = {"semantics_during_call", "semantics_until_transfer", "semantics_zero_copy",
                                          "semantics_mutable_zero_copy"};
  PJRT_Memory* memory = args->memory ? args->memory : args->device->memories[0];
  Shape shape{ItemSize(args->type), Dims(args->dims, args->dims + args->num_dims)};
  Dims from_strides = shape.Strides(shape.RowMajor());
  if (args->num_byte_strides) from_strides.assign(args->byte_strides, args->byte_strides + args->num_byte_strides);
  Dims order = shape.DefaultOrder();
  if (PJRT_Error* error = ReadLayout(args->device_layout, &order)) return error;
  std::unique_ptr<PJRT_Buffer> made;
  if (PJRT_Error* error = NewBuffer(args->type, shape, order, memory, &made)) return error;
  Count(semantics[args->host_buffer_semantics]);

  StoragePtr to = made->storage;
  auto let_go = std::make_shared<Promise>();  // the host's memory may change or go
  std::function<void()> copy;
  if (args->host_buffer_semantics == PJRT_HostBufferSemantics_kImmutableOnlyDuringCall) {
    auto staged = std::make_shared<std::vector<char>>(to->bytes);
    Copy(shape, staged->data(), made->Strides(), static_cast<const char*>(args->data), from_strides);
    let_go->Set();
    copy = [to, staged] { memcpy(to->data, staged->data(), to->bytes); };
  } else {
    copy = [shape, to, to_strides = made->Strides(), from = static_cast<const char*>(args->data), from_strides] {
      Copy(shape, to->data, to_strides, from, from_strides);
    };
  }
  bool early = let_go->ready();
  memory->device->in.Push({HOST, memory->place, to->bytes, nullptr, std::move(copy),
                           [early, let_go, ready = made->ready](PJRT_Error* problem) {
                             Settle(ready, problem);
                             if (!early) let_go->Set();
                           }});
  args->buffer = made.release();
  args->done_with_host_buffer = new PJRT_Event{let_go};
  return nullptr;
}

GETTER(DeviceDescription_Id, id, args->device_description->id)
GETTER(DeviceDescription_ProcessIndex, process_index, args->device_description->process)

FUNCTION(DeviceDescription_Attributes) {
  args->num_attributes = 0;
  args->attributes = nullptr;
  return nullptr;
}

TEXT_GETTER(DeviceDescription_Kind, device_kind, state.device_kind)
TEXT_GETTER(DeviceDescription_DebugString, debug_string, args->device_description->text)
TEXT_GETTER(DeviceDescription_ToString, to_string, args->device_description->text)
GETTER(Device_GetDescription, device_description, &args->device->description)
GETTER(Device_IsAddressable, is_addressable, args->device->addressable)
GETTER(Device_LocalHardwareId, local_hardware_id, args->device->addressable ? args->device->description.local : -1)
LIST_GETTER(Device_AddressableMemories, memories, num_memories, args->device->memories)
GETTER(Device_DefaultMemory, memory, args->device->memories[0])
GETTER(Memory_Id, id, args->memory->id)
TEXT_GETTER(Memory_Kind, kind, args->memory->kind)
GETTER(Memory_Kind_Id, kind_id, args->memory->place)
TEXT_GETTER(Memory_DebugString, debug_string, args->memory->text)
TEXT_GETTER(Memory_ToString, to_string, args->memory->text)

FUNCTION(Memory_AddressableByDevices) {
  args->devices = &args->memory->device;
  args->num_devices = 1;
  return nullptr;
}

FUNCTION(Buffer_Destroy) {
  delete args->buffer;
  return nullptr;
}

GETTER(Buffer_ElementType, type, args->buffer->type)
LIST_GETTER(Buffer_Dimensions, dims, num_dims, args->buffer->shape.dims)
LIST_GETTER(Buffer_UnpaddedDimensions, unpadded_dims, num_dims, args->buffer->shape.dims)

FUNCTION(Buffer_DynamicDimensionIndices) {
  args->dynamic_dim_indices = nullptr;
  args->num_dynamic_dims = 0;
  return nullptr;
}

FUNCTION(Buffer_GetMemoryLayout) {
  args->layout = {};
  args->layout.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
  args->layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  args->layout.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
  args->layout.tiled.minor_to_major = args->buffer->minor_to_major.data();
  args->layout.tiled.minor_to_major_size = args->buffer->minor_to_major.size();
  return nullptr;
}

GETTER(Buffer_OnDeviceSizeInBytes, on_device_size_in_bytes, args->buffer->shape.bytes())
GETTER(Buffer_Device, device, args->buffer->memory->device)
GETTER(Buffer_Memory, memory, args->buffer->memory)

// The memory stays while a transfer reads it or a view exists, as on real devices. Donating it would not be safe then.
FUNCTION(Buffer_Delete) {
  PJRT_Buffer* buffer = args->buffer;
  Lock lock(buffer->mutex);
  if (buffer->deleted) return nullptr;
  buffer->deleted = true;
  if (*buffer->readers > 0) Count("deleted_while_read");
  if (buffer->views > 0) {
    Count("deleted_while_viewed");
  } else {
    buffer->storage.reset();
  }
  Lock log(state.mutex);
  state.Add({"deleted", -1, buffer->memory->place, buffer->memory->place, buffer->memory->device->description.id,
             buffer->shape.bytes()});
  return nullptr;
}

FUNCTION(Buffer_IsDeleted) {
  Lock lock(args->buffer->mutex);
  args->is_deleted = args->buffer->deleted;
  return nullptr;
}

FUNCTION(Buffer_CopyToDevice) { return CopyBuffer(args->buffer, args->dst_device->memories[0], &args->dst_buffer); }
FUNCTION(Buffer_CopyToMemory) { return CopyBuffer(args->buffer, args->dst_memory, &args->dst_buffer); }

FUNCTION(Buffer_ToHostBuffer) {
  PJRT_Buffer* buffer = args->src;
  StoragePtr from = buffer->Hold();
  if (!from) return Deleted();
  if (args->dst == nullptr) {  // only the size is asked for
    args->dst_size = from->bytes;
    return nullptr;
  }
  if (args->dst_size < from->bytes) return Fail(PJRT_Error_Code_INVALID_ARGUMENT, "the destination is too small");
  Dims order = buffer->minor_to_major;
  if (PJRT_Error* error = ReadLayout(args->host_layout, &order)) return error;
  auto arrived = std::make_shared<Promise>();
  ++*buffer->readers;
  buffer->memory->device->out.Push(
      {buffer->memory->place, HOST, from->bytes, buffer->ready,
       [shape = buffer->shape, to = static_cast<char*>(args->dst), to_strides = buffer->shape.Strides(order), from,
        from_strides = buffer->Strides()] { Copy(shape, to, to_strides, from->data, from_strides); },
       [readers = buffer->readers, arrived](PJRT_Error* problem) {
         --*readers;
         Settle(arrived, problem);
       }});
  args->event = new PJRT_Event{arrived};
  return nullptr;
}

GETTER(Buffer_IsOnCpu, is_on_cpu, args->buffer->memory->place == PINNED)
GETTER(Buffer_ReadyEvent, event, new PJRT_Event{args->buffer->ready})

FUNCTION(Buffer_UnsafePointer) {
  StoragePtr storage = args->buffer->Hold();
  if (!storage) return Deleted();
  args->buffer_pointer = reinterpret_cast<uintptr_t>(storage->data);
  return nullptr;
}

FUNCTION(Buffer_OpaqueDeviceMemoryDataPointer) {
  StoragePtr storage = args->buffer->Hold();
  if (!storage) return Deleted();
  args->device_memory_ptr = storage->data;
  return nullptr;
}

FUNCTION(Buffer_IncreaseExternalReferenceCount) {
  Lock lock(args->buffer->mutex);
  if (args->buffer->deleted) return Deleted();
  args->buffer->views++;
  Count("views_taken");
  Count("views");
  return nullptr;
}

FUNCTION(Buffer_DecreaseExternalReferenceCount) {
  Lock lock(args->buffer->mutex);
  args->buffer->views--;
  Count("views", -1);
  if (args->buffer->deleted && args->buffer->views == 0) args->buffer->storage.reset();
  return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// The extension through which JAX asks for the layout of an array. It wants text such as "{1,0}".

struct PJRT_Layouts_MemoryLayout {
  Dims minor_to_major;
};

struct PJRT_Layouts_SerializedLayout {
  std::string text;
};

FUNCTION(Layouts_MemoryLayout_Destroy) {
  delete args->layout;
  return nullptr;
}

FUNCTION(Layouts_MemoryLayout_Serialize) {
  std::string text;
  for (int64_t axis : args->layout->minor_to_major) text += (text.empty() ? "" : ",") + std::to_string(axis);
  auto* serialized = new PJRT_Layouts_SerializedLayout{"{" + text + "}"};
  args->serialized_bytes = serialized->text.c_str();
  args->serialized_bytes_size = serialized->text.size();
  args->serialized_layout = serialized;
  args->serialized_layout_deleter = [](PJRT_Layouts_SerializedLayout* layout) { delete layout; };
  return nullptr;
}

FUNCTION(Layouts_PJRT_Client_GetDefaultLayout) {
  Shape shape{ItemSize(args->type), Dims(args->dims, args->dims + args->num_dims)};
  args->layout = new PJRT_Layouts_MemoryLayout{shape.DefaultOrder()};
  return nullptr;
}

GETTER(Layouts_PJRT_Buffer_MemoryLayout, layout, new PJRT_Layouts_MemoryLayout{args->buffer->minor_to_major})

PJRT_Layouts_Extension* MakeLayouts() {
  auto* layouts = new PJRT_Layouts_Extension{};
  layouts->base = {sizeof(PJRT_Layouts_Extension), PJRT_Extension_Type_Layouts, nullptr};
  layouts->PJRT_Layouts_MemoryLayout_Destroy = Layouts_MemoryLayout_Destroy;
  layouts->PJRT_Layouts_MemoryLayout_Serialize = Layouts_MemoryLayout_Serialize;
  layouts->PJRT_Layouts_PJRT_Client_GetDefaultLayout = Layouts_PJRT_Client_GetDefaultLayout;
  layouts->PJRT_Layouts_PJRT_Buffer_MemoryLayout = Layouts_PJRT_Buffer_MemoryLayout;
  return layouts;
}

PJRT_Api MakeTable() {
  PJRT_Api api{};
  api.struct_size = PJRT_Api_STRUCT_SIZE;
  api.extension_start = MakeLayouts();
  api.pjrt_api_version = {PJRT_Api_Version_STRUCT_SIZE, nullptr, 0, 70};  // a version that every supported JAX accepts
#define UNIMPLEMENTED(name)                                                                          \
  api.name = [](name##_Args*) {                                                                      \
    return Fail(PJRT_Error_Code_UNIMPLEMENTED, "the simulated device does not implement " #name);    \
  };
  PJRT_FOR_EACH_FUNCTION(UNIMPLEMENTED)
#define IMPLEMENTED(name) api.PJRT_##name = name;
  IMPLEMENTED(Error_Destroy) IMPLEMENTED(Error_Message) IMPLEMENTED(Error_GetCode) IMPLEMENTED(Error_ForEachPayload)
  IMPLEMENTED(Plugin_Initialize) IMPLEMENTED(Plugin_Attributes) IMPLEMENTED(Event_Destroy) IMPLEMENTED(Event_IsReady)
  IMPLEMENTED(Event_Error) IMPLEMENTED(Event_Await) IMPLEMENTED(Event_OnReady) IMPLEMENTED(Client_Create)
  IMPLEMENTED(Client_Destroy) IMPLEMENTED(Client_PlatformName) IMPLEMENTED(Client_ProcessIndex)
  IMPLEMENTED(Client_PlatformVersion) IMPLEMENTED(Client_Devices) IMPLEMENTED(Client_AddressableDevices)
  IMPLEMENTED(Client_LookupDevice) IMPLEMENTED(Client_LookupAddressableDevice) IMPLEMENTED(Client_AddressableMemories)
  IMPLEMENTED(Client_UpdateGlobalProcessInfo) IMPLEMENTED(Client_DefaultDeviceAssignment)
  IMPLEMENTED(Client_BufferFromHostBuffer) IMPLEMENTED(DeviceDescription_Id)
  IMPLEMENTED(DeviceDescription_ProcessIndex) IMPLEMENTED(DeviceDescription_Attributes)
  IMPLEMENTED(DeviceDescription_Kind) IMPLEMENTED(DeviceDescription_DebugString)
  IMPLEMENTED(DeviceDescription_ToString) IMPLEMENTED(Device_GetDescription) IMPLEMENTED(Device_IsAddressable)
  IMPLEMENTED(Device_LocalHardwareId) IMPLEMENTED(Device_AddressableMemories) IMPLEMENTED(Device_DefaultMemory)
  IMPLEMENTED(Memory_Id) IMPLEMENTED(Memory_Kind) IMPLEMENTED(Memory_Kind_Id) IMPLEMENTED(Memory_DebugString)
  IMPLEMENTED(Memory_ToString) IMPLEMENTED(Memory_AddressableByDevices) IMPLEMENTED(Buffer_Destroy)
  IMPLEMENTED(Buffer_ElementType) IMPLEMENTED(Buffer_Dimensions) IMPLEMENTED(Buffer_UnpaddedDimensions)
  IMPLEMENTED(Buffer_DynamicDimensionIndices) IMPLEMENTED(Buffer_GetMemoryLayout)
  IMPLEMENTED(Buffer_OnDeviceSizeInBytes) IMPLEMENTED(Buffer_Device) IMPLEMENTED(Buffer_Memory)
  IMPLEMENTED(Buffer_Delete) IMPLEMENTED(Buffer_IsDeleted) IMPLEMENTED(Buffer_CopyToDevice)
  IMPLEMENTED(Buffer_CopyToMemory) IMPLEMENTED(Buffer_ToHostBuffer) IMPLEMENTED(Buffer_IsOnCpu)
  IMPLEMENTED(Buffer_ReadyEvent) IMPLEMENTED(Buffer_UnsafePointer) IMPLEMENTED(Buffer_OpaqueDeviceMemoryDataPointer)
  IMPLEMENTED(Buffer_IncreaseExternalReferenceCount) IMPLEMENTED(Buffer_DecreaseExternalReferenceCount)
  return api;
}

// ---------------------------------------------------------------------------------------------------------------------
// What programs call: JAX the first of these, tests the others.

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = MakeTable();
  return &api;
}

// No transfer of this direction begins until they are released.
EXPORTED void simulated_hold(int direction) {
  Lock lock(state.mutex);
  state.held[direction] = true;
  state.permits[direction] = 0;
}

EXPORTED void simulated_release(int direction) {
  Lock lock(state.mutex);
  state.held[direction] = false;
  state.changed.notify_all();
}

// This many held transfers may begin; the others stay held.
EXPORTED void simulated_permit(int direction, int64_t count) {
  Lock lock(state.mutex);
  state.permits[direction] += count;
  state.changed.notify_all();
}

EXPORTED void simulated_set_rate(int direction, double bytes_per_second) {
  Lock lock(state.mutex);
  state.bytes_per_second[direction] = bytes_per_second;
}

// Negative: no limit. What is there already stays.
EXPORTED void simulated_set_capacity(int place, int64_t bytes) {
  Lock lock(state.mutex);
  state.live[place].capacity = bytes < 0 ? kUnlimited : bytes;
}

EXPORTED void simulated_set_poison(int on) { state.poisons = on; }
EXPORTED void simulated_set_touch(int on) { state.touches = on; }

// The default layout becomes the one whose first axis is the most minor, as a TPU has for some shapes.
EXPORTED void simulated_set_column_major(int on) { state.column_major = on; }

// The transfer that comes after this many others, counted from now, fails.
EXPORTED void simulated_fail_after(int64_t others) {
  Lock lock(state.mutex);
  state.failing.insert(state.next_number + others);
}

// An entry of the log that says where the program is.
EXPORTED void simulated_mark(const char* text) {
  Lock lock(state.mutex);
  state.Add({text});
}

// Waits until a counter has reached a value; 0 if it did not within the time.
EXPORTED int simulated_await(const char* counter, int64_t value, double seconds) {
  Lock lock(state.mutex);
  return state.changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                [&] { return state.counters[counter] >= value; });
}

// Counts and logs from the beginning; 0 if that is not possible because transfers are under way.
EXPORTED int simulated_reset() {
  Lock lock(state.mutex);
  for (UnderWay& under_way : state.under_way) {
    if (under_way.now.count > 0) return 0;
    under_way.most = {};
  }
  int64_t views = state.counters["views"];
  state.counters.clear();
  state.counters["views"] = views;
  state.moved = {};
  state.log.clear();
  for (Live& live : state.live) live.most = live.now;
  return 1;
}

// All counters and the log as JSON; valid until this thread calls it again.
EXPORTED const char* simulated_report() {
  static thread_local std::string report;
  std::ostringstream out;
  Lock lock(state.mutex);
  auto counters = state.counters;
  for (int from = 0; from < PLACES; from++) {
    for (int to = 0; to < PLACES; to++) {
      std::string name = std::string(kPlaceNames[from]) + "_to_" + kPlaceNames[to];
      if (from == HOST && to == HOST) continue;
      counters[name] = state.moved[from][to].count;
      counters[name + "_bytes"] = state.moved[from][to].bytes;
    }
  }
  for (int direction = 0; direction < DIRECTIONS; direction++) {
    std::string name = kDirectionNames[direction];
    counters[name + "_under_way"] = state.under_way[direction].now.count;
    counters[name + "_most_under_way"] = state.under_way[direction].most.count;
    counters[name + "_most_bytes_under_way"] = state.under_way[direction].most.bytes;
  }
  for (int place : {DEVICE, PINNED}) {
    counters[std::string(kPlaceNames[place]) + "_live_bytes"] = state.live[place].now;
    counters[std::string(kPlaceNames[place]) + "_peak_bytes"] = state.live[place].most;
  }
  out << "{\"counters\": {";
  const char* separator = "";
  for (auto& [name, value] : counters) {
    out << separator << '"' << name << "\": " << value;
    separator = ", ";
  }
  out << "}, \"log\": [";
  separator = "";
  for (const Record& record : state.log) {
    out << separator << "[\"" << record.what << "\", " << record.transfer << ", \"" << kPlaceNames[record.from]
        << "\", \"" << kPlaceNames[record.to] << "\", " << record.device << ", " << record.bytes << ']';
    separator = ", ";
  }
  out << "]}";
  report = out.str();
  return report.c_str();
}
