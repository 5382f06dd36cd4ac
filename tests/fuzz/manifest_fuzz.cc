// What a model file says of itself: all of it is well, or the error says what is not.

#include <cmath>

#include "absl/strings/match.h"
#include "runtime/admission/admission.h"
#include "runtime/kv/kv_layout.h"
#include "runtime/model/manifest.h"
#include "runtime/model/model_shape.h"
#include "runtime/text/utf8.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

void CheckLayer(const LayerFacts& layer, const Manifest& m) {
  Require(layer.key_width > 0 && layer.value_width > 0, "rows have channels");
  Require(std::isfinite(layer.scale) && layer.scale > 0, "scale");
  Require(layer.rope >= 0 && layer.rope < static_cast<int64_t>(m.ropes.size()), "rope");
  Require(2 * static_cast<int64_t>(m.ropes[layer.rope].inv_freq.size()) <= layer.key_width,
          "no more channels are rotated than there are");
  Require(!layer.window.has_value() || *layer.window > 0, "window");
  Require(!layer.soft_cap.has_value() || *layer.soft_cap > 0, "soft cap");
}

void CheckManifest(absl::string_view json) {
  const absl::StatusOr<Manifest> m = Manifest::Parse(json);
  if (!m.ok()) {
    Require(absl::StartsWith(m.status().message(), "manifest: "), "an error says of what",
            m.status().message());
    Require(!FirstInvalidUtf8(m.status().message()).has_value(), "and can be told to operators");
    return;
  }
  Require(m->vocab_size > 0 && m->context_length > 0 && m->hidden_size > 0, "sizes");
  Require(m->num_kv_heads > 0 && m->num_heads % m->num_kv_heads == 0, "heads share KV evenly");
  Require(!m->layers.empty() && !m->name.empty(), "there is a model");
  for (const LayerFacts& layer : m->layers) CheckLayer(layer, *m);
  for (int32_t token : m->eos_tokens) Require(token >= 0 && token < m->vocab_size, "eos");
  if (m->bos_token.has_value()) {
    Require(*m->bos_token >= 0 && *m->bos_token < m->vocab_size, "bos");
  }
  // What admission computes of it does not overflow.
  const KvLayout layout = LayoutOf(ShapeOf(*m), {m->dtype}, {}, 0);
  Require(layout.num_lanes == m->num_layers() * m->num_kv_heads && layout.row_bytes > 0, "lanes");
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckManifest({reinterpret_cast<const char*>(data), size});
  return 0;
}
