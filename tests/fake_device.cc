#include "tests/fake_device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <bit>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/varlen_attention.h"

namespace epikv {
namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;

int64_t copies = 0, flash_calls = 0;
bool fails = false;

struct Block {
  void* address = nullptr;  // what the device says; nothing is there
  char* host = nullptr;     // where it is
  size_t bytes = 0;
};

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    std::vector<Block*>& free = Free(std::bit_ceil(bytes));
    if (free.empty()) free.push_back(Make(std::bit_ceil(bytes)));
    Block* const block = free.back();
    free.pop_back();
    return {block->address, block, &Return, c10::Device(kFake, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not copied so"); }

 private:
  static Block* Make(size_t bytes) {
    void* const address =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "no addresses left");
    return new Block{
        .address = address, .host = static_cast<char*>(std::malloc(bytes)), .bytes = bytes};
  }
  // Blocks of so many bytes that nobody has.
  static std::vector<Block*>& Free(size_t bytes) {
    static auto& free = *new std::map<size_t, std::vector<Block*>>;
    return free[bytes];
  }
  static void Return(void* block) {
    Free(static_cast<Block*>(block)->bytes).push_back(static_cast<Block*>(block));
  }
};

Memory& TheMemory() {
  static Memory& memory = *new Memory;
  return memory;
}

bool IsFake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

// The same elements as a tensor of the CPU.
at::Tensor Alias(const at::Tensor& tensor) {
  const auto options = at::dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  const auto* const block = static_cast<const Block*>(tensor.storage().data_ptr().get_context());
  char* const data =
      block->host + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

at::Tensor Empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &TheMemory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor EmptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &TheMemory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor ToFake(const at::Tensor& tensor) {
  const at::Tensor fake =
      EmptyStrided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  Alias(fake).copy_(tensor);
  return fake;
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool) {
  if (IsFake(from) && !IsFake(to)) {
    ++copies;
    TORCH_CHECK(!std::exchange(fails, false), "the device failed");
  }
  (IsFake(to) ? Alias(to) : to).copy_(IsFake(from) ? Alias(from) : from);
  return to;
}

at::Scalar Number(const at::Tensor& tensor) {
  ++copies;
  return Alias(tensor).item();
}

// One operation on the CPU, over aliases.
class Operation {
 public:
  explicit Operation(const c10::OperatorHandle& op) : op_(op) {}

  void Run(torch::jit::Stack& stack) {
    const size_t arguments = op_.schema().arguments().size();
    for (size_t i = stack.size() - arguments; i < stack.size(); ++i) stack[i] = OnCpu(stack[i]);
    TORCH_CHECK(aliases_.empty() || host_tensors_ == 0, op_.schema().name(),
                ": tensors of two devices");
    op_.callBoxed(stack);
    const size_t returns = op_.schema().returns().size();
    for (size_t i = stack.size() - returns; i < stack.size(); ++i) stack[i] = OnDevice(stack[i]);
    for (const auto& [alias, original] : aliases_) Resized(alias, original);
  }

 private:
  at::Tensor AliasOf(const at::Tensor& tensor) {
    if (!IsFake(tensor)) {
      if (tensor.defined() && tensor.dim() > 0) ++host_tensors_;
      return tensor;
    }
    for (const auto& [alias, original] : aliases_) {  // one and the same, as in place
      if (original.is_same(tensor)) return alias;
    }
    aliases_.emplace_back(Alias(tensor), tensor);
    return aliases_.back().first;
  }

  c10::IValue OnCpu(const c10::IValue& value) {
    if (value.isTensor()) return AliasOf(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == kFake) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(AliasOf(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::optional(AliasOf(*tensor)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  c10::IValue OnDevice(const c10::IValue& value) {
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(ToFake(tensor));
      return list;
    }
    if (!value.isTensor() || !value.toTensor().defined()) return value;
    for (const auto& [alias, original] : aliases_) {
      if (alias.is_same(value.toTensor())) return original;
    }
    return ToFake(value.toTensor());
  }

  // What had no elements may have been given some.
  static void Resized(const at::Tensor& alias, const at::Tensor& original) {
    if (alias.sizes() == original.sizes()) return;
    const at::Tensor fake = ToFake(alias);
    original.unsafeGetTensorImpl()->set_storage_keep_dtype(fake.storage());
    original.unsafeGetTensorImpl()->set_sizes_and_strides(fake.sizes(), fake.strides());
  }

  const c10::OperatorHandle& op_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // and their originals
  int64_t host_tensors_ = 0;  // among the arguments; numbers that travel as tensors do not count
};

void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Operation(op).Run(*stack);
}

// aten::_flash_attention_forward over lanes.
void Flash(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++flash_calls;
  const size_t arguments = op.schema().arguments().size();
  auto argument = [&](const char* name) -> const c10::IValue& {
    return (*stack)[stack->size() - arguments + *op.schema().argumentIndexWithName(name)];
  };
  const at::Tensor q = argument("query").toTensor(), k = argument("key").toTensor(),
                   v = argument("value").toTensor();
  const at::Tensor query_starts = argument("cum_seq_q").toTensor(),
                   starts = argument("cum_seq_k").toTensor();
  const at::Tensor lengths = argument("seqused_k").toTensor();
  const int64_t b = query_starts.numel() - 1;
  for (const at::Tensor& rows : {q, k, v}) {
    TORCH_CHECK(
        IsFake(rows) && rows.dtype() == q.dtype() && rows.dim() == 3 && rows.stride(-1) == 1,
        "rows");
    TORCH_CHECK(rows.size(2) == q.size(2), "width");
  }
  TORCH_CHECK(q.size(2) % 8 == 0 && q.size(2) <= 256 && b > 0);
  TORCH_CHECK(k.size(1) == 1 && v.size(1) == 1, "one KV head");
  for (const at::Tensor& numbers : {query_starts, starts, lengths}) {
    TORCH_CHECK(IsFake(numbers) && numbers.dtype() == at::kInt && numbers.is_contiguous(),
                "numbers");
  }
  TORCH_CHECK(starts.numel() == b + 1 && lengths.numel() == b);
  TORCH_CHECK(argument("dropout_p").toDouble() == 0 && argument("window_size_left").isNone() &&
              argument("window_size_right").isNone() && argument("block_table").isNone());
  const at::Tensor queries = Alias(query_starts).diff();
  const at::Tensor used = Alias(lengths);
  TORCH_CHECK(queries.min().item<int64_t>() > 0 && queries.sum().item<int64_t>() == q.size(0));
  TORCH_CHECK(queries.max().item<int64_t>() == argument("max_q").toInt());
  TORCH_CHECK(used.max().item<int64_t>() == argument("max_k").toInt());
  TORCH_CHECK((Alias(starts).narrow(0, 0, b) + used).max().item<int64_t>() <= k.size(0),
              "rows end");
  const at::Tensor out = ToFake(VarlenAttention({.q = Alias(q),
                                                 .keys = Alias(k).squeeze(1),
                                                 .values = Alias(v).squeeze(1),
                                                 .query_starts = Alias(query_starts),
                                                 .starts = Alias(starts),
                                                 .lengths = used,
                                                 .max_queries = argument("max_q").toInt(),
                                                 .max_length = argument("max_k").toInt(),
                                                 .causal = argument("is_causal").toBool(),
                                                 .scale = argument("scale").toDouble()}));
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, out, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<kFake>);

}  // namespace

at::Device FakeDevice() {
  static const bool once = [] {
    c10::register_privateuse1_backend("fake");
    c10::SetAllocator(kFake, &TheMemory());
    return true;
  }();
  (void)once;
  return at::Device(kFake, 0);
}

int64_t CopiesFromFakeDevice() { return copies; }

void FailNextCopyFromFakeDevice() { fails = true; }

int64_t FlashCallsOnFakeDevice() { return flash_calls; }

}  // namespace epikv

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&epikv::Fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(epikv::Empty));
  m.impl("empty_strided", TORCH_FN(epikv::EmptyStrided));
  m.impl("_copy_from", TORCH_FN(epikv::CopyFrom));
  m.impl("_local_scalar_dense", TORCH_FN(epikv::Number));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("_flash_attention_forward", torch::CppFunction::makeFromBoxedFunction<&epikv::Flash>());
}
