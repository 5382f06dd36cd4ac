#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/attention/kernel_choice.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/kv_format.h"
#include "runtime/kv/sequence_cache.h"
#include "runtime/kv/sequence_tier.h"
#include "runtime/model/manifest.h"

namespace epikv {

// How one decode query attends. Chosen at start-up (kernel_choice.h), never by the policy. At
// layers with a soft cap or a window, over K and V of int8, and where a part is read, it is kBatch.
enum class DecodeKernel {
  kBatch,   // our loop, one call for all sequences' lanes
  kFlash,   // the SDPA flash kernel, one call a sequence
  kMatmul,  // a grouped matmul, softmax, matmul, a few calls a sequence
};
absl::string_view DecodeKernelName(DecodeKernel kernel);

// How a prompt's rows attend. kBatch is our loop, one call for all prompts' lanes, where the
// processor has one for the shape; elsewhere, and with kFlash, the SDPA flash kernel, a call or two
// a sequence. Over K and V of int8 it is kBatch.
enum class PrefillKernel { kBatch, kFlash };
absl::string_view PrefillKernelName(PrefillKernel kernel);

// Where the tokens of a lane are, at a layer whose window hides some of them: a row sees those
// whose position is above its own less the window.
struct LanePositions {
  const int64_t* of_slots = nullptr;  // [used]
  int64_t of_first_row = 0;           // those of the other rows follow
};

// One sequence's rows of a step, at one layer. Its K and V are already in the lanes.
struct AttentionItem {
  const SequenceCache* cache = nullptr;
  int64_t row = 0;  // first row of q and out
  int64_t num_rows = 0;
  bool decode = false;  // one row, which sees every slot
  // Per KV head: slots to read, the new rows included. Prefill: the new rows are the last.
  absl::Span<const int64_t> used;
  // Per KV head: where its keys are, laid out as the lanes are. Empty: in the lanes.
  absl::Span<char* const> keys;
  // Per KV head. Empty: every row sees every slot that is not younger.
  absl::Span<const LanePositions> positions;
  // Decode, per KV head: the slots that are read, ascending. Empty, of a head or at all: all are.
  absl::Span<const std::vector<SlotRange>> reads;
  // Decode, if not null: where Run leaves the logits, so that NewestRows need not make them again;
  // or nothing, where its kernel makes none.
  std::vector<float>* logits = nullptr;
  // Prefill, if not null: where Run leaves the log-sum-exp of each query's logits, [heads,
  // num_rows], fp32. Of the lanes alone.
  at::Tensor* log_sum_exp = nullptr;
  // If not null: what each row attends to besides, of each KV head `far_tokens` at most. With
  // log_sum_exp.
  const SequenceTier* tier = nullptr;
  int64_t far_tokens = 0;
};

struct AttentionShape {
  int64_t num_heads = 0, num_kv_heads = 0;
  int64_t key_width = 0, value_width = 0;
  double scale = 1;
  std::optional<double> soft_cap;  // LayerFacts
  std::optional<int64_t> window;
  at::ScalarType dtype = at::kFloat;  // of q and out
  KvDType stored = KvDType::kModel;   // of K and V
  int64_t group() const { return num_heads / num_kv_heads; }
};

// Work since the start, in query rows x KV heads.
struct AttentionCounts {
  int64_t attended = 0;  // by Run
  int64_t measured = 0;  // by NewestRows and ColumnSums: once more, for those who asked
};

// Attention of all items at one layer. Stateless but for scratch and counts; engine thread.
class Attention {
 public:
  Attention(DecodeKernel decode, PrefillKernel prefill) : decode_(decode), prefill_(prefill) {}

  // q [n, heads, key_width], rotated, contiguous -> out [n, heads, value_width]; rows behind those
  // of the items are zero.
  at::Tensor Run(const at::Tensor& q, int64_t layer, absl::Span<const AttentionItem> items,
                 const AttentionShape& shape) const;

  // Probabilities of a decode item's query over each slot, averaged over the group, in fp32: of
  // every KV head, one after another, `used` floats each.
  void NewestRows(const at::Tensor& q, int64_t layer, const AttentionItem& item,
                  const AttentionShape& shape, absl::Span<float> rows) const;

  // The same of a prefill item, summed over its queries. After Run, with its log_sum_exp: exp(logit
  // - log_sum_exp), block by block, so that no [rows, used] matrix of all heads is ever held.
  void ColumnSums(const at::Tensor& q, int64_t layer, const AttentionItem& item,
                  const AttentionShape& shape, absl::Span<float> sums) const;

  DecodeKernel decode_kernel() const { return decode_; }
  const AttentionCounts& counts() const { return counts_; }

 private:
  const DecodeKernel decode_;
  const PrefillKernel prefill_;
  mutable AttentionCounts counts_;
};

// Times every kernel on this machine with the calling thread's team. Fastest first. Decode: 8
// sequences of 512 tokens; prefill: 256 rows behind as many.
std::vector<KernelTiming<DecodeKernel>> MeasureDecodeKernels(const AttentionShape& shape);
std::vector<KernelTiming<PrefillKernel>> MeasurePrefillKernels(const AttentionShape& shape);

}  // namespace epikv
