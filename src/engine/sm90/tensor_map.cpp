#include "engine/sm90/tensor_map.h"

#include <cudaTypedefs.h>

#include <string>

#include "engine/sm90/cuda_support.h"
#include "engine/sm90/tiles.h"

namespace clowder::sm90 {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
          "finding the driver's tensor maps");
  if (function == nullptr) throw Error(ErrorCode::kUnsupported, "the CUDA driver is too old; install one for CUDA 12");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

CUtensorMap encode(const bf16* data, std::uint32_t rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                   const cuuint32_t* box) {
  static const PFN_cuTensorMapEncodeTiled_v12000 kEncode = find_encoder();
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = kEncode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<bf16*>(data), sizes, strides,
                                  box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::kInternal, "encoding a tensor map failed with code " + std::to_string(result));
  }
  return map;
}

}  // namespace

CUtensorMap make_matrix_map(const bf16* data, const MatrixShape& shape, int box_rows) {
  if (data == nullptr || shape.rows == 0 || shape.columns == 0) return {};
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(shape.columns), static_cast<cuuint64_t>(shape.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(shape.row_stride) * sizeof(bf16)};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  return encode(data, 2, sizes, strides, box);
}

CUtensorMap make_slot_map(const bf16* data, std::int64_t tokens, std::int32_t topk, std::int64_t columns) {
  if (data == nullptr || tokens == 0) return {};
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(topk),
                              static_cast<cuuint64_t>(tokens)};
  const cuuint64_t row = static_cast<cuuint64_t>(columns) * sizeof(bf16);
  const cuuint64_t strides[] = {row, row * static_cast<cuuint64_t>(topk)};
  const cuuint32_t box[] = {kBoxColumns, 1, kBlockRows};
  return encode(data, 3, sizes, strides, box);
}

}  // namespace clowder::sm90
