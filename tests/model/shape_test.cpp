#include "model/shape.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

namespace clowder {
namespace {

LayerShape good_shape() {
  LayerShape shape;
  shape.hidden = 256;
  shape.intermediate = 128;
  shape.num_experts = 8;
  shape.topk = 2;
  shape.max_tokens = 64;
  return shape;
}

// The message starts with the argument's name and says what the value was.
void expect_refused(const LayerShape& shape, int ranks, const std::string& argument, const std::string& value) {
  try {
    validate(shape, ranks);
    ADD_FAILURE() << argument << " " << value << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
    const std::string message = error.what();
    EXPECT_EQ(message.find(argument + ": "), 0u) << message;
    EXPECT_NE(message.find(value), std::string::npos) << message;
    EXPECT_NE(message.find("must be"), std::string::npos) << message;
  }
}

TEST(Shape, GoodOnesPass) {
  for (const int ranks : {1, 2, 4, 8}) EXPECT_NO_THROW(validate(good_shape(), ranks));
  LayerShape shape = good_shape();
  shape.max_tokens = 0;
  shape.shared_intermediate = 32;
  shape.topk = 16;
  shape.activation = {ActivationKind::kSwigluClamp, 7.0f};
  EXPECT_NO_THROW(validate(shape, 1));
  shape.hidden = shape.intermediate = 65536;
  EXPECT_NO_THROW(validate(shape, 1));
}

TEST(Shape, EveryBadArgumentIsNamed) {
  const auto refuse = [](const std::string& argument, const std::string& value,
                         const std::function<void(LayerShape&)>& change, int ranks = 1) {
    LayerShape shape = good_shape();
    change(shape);
    expect_refused(shape, ranks, argument, value);
  };
  for (const std::int64_t width : {0, -32, 1, 33, 65568}) {
    refuse("hidden", std::to_string(width), [&](LayerShape& s) { s.hidden = width; });
    refuse("intermediate", std::to_string(width), [&](LayerShape& s) { s.intermediate = width; });
    if (width != 0) {
      refuse("shared_intermediate", std::to_string(width), [&](LayerShape& s) { s.shared_intermediate = width; });
    }
  }
  for (const std::int32_t experts : {0, -8, 65537}) {
    refuse("num_experts", std::to_string(experts), [&](LayerShape& s) { s.num_experts = experts; });
  }
  refuse(
      "num_experts", "8", [](LayerShape&) {}, 3);
  refuse(
      "num_experts", "8", [](LayerShape&) {}, 16);
  for (const int ranks : {0, -1})
    refuse(
        "group", std::to_string(ranks), [](LayerShape&) {}, ranks);
  for (const std::int32_t topk : {0, -1, 17}) {
    refuse("topk", std::to_string(topk), [&](LayerShape& s) { s.topk = topk; });
  }
  refuse("max_tokens", "-1", [](LayerShape& s) { s.max_tokens = -1; });
  for (const float limit : {0.0f, -1.0f, INFINITY, NAN}) {
    refuse("activation", "limit", [&](LayerShape& s) { s.activation = {ActivationKind::kSwigluClamp, limit}; });
  }
  refuse("activation", "77", [](LayerShape& s) { s.activation.kind = static_cast<ActivationKind>(77); });
}

// Rows and schedules are indexed in int32, whatever the shape.
TEST(Shape, MaxTokensKeepsRowsWithinInt32) {
  for (const int ranks : {1, 2, 8, 64}) {
    for (const std::int32_t topk : {1, 2, 16}) {
      LayerShape shape = good_shape();
      shape.num_experts = 512;
      shape.topk = topk;
      shape.max_tokens = std::numeric_limits<std::int32_t>::max() / (std::int64_t{ranks} * topk) + 1;
      expect_refused(shape, ranks, "max_tokens", std::to_string(shape.max_tokens));
      shape.max_tokens = 1000000;
      EXPECT_NO_THROW(validate(shape, ranks));
    }
  }
  LayerShape shape = good_shape();
  shape.max_tokens = std::numeric_limits<std::int64_t>::max();
  expect_refused(shape, 8, "max_tokens", std::to_string(shape.max_tokens));
}

TEST(Types, ErrorCodesHaveTheirPublicNames) {
  EXPECT_STREQ(to_string(ErrorCode::kArgument), "argument");
  EXPECT_STREQ(to_string(ErrorCode::kUnsupported), "unsupported");
  EXPECT_STREQ(to_string(ErrorCode::kTimeout), "timeout");
  EXPECT_STREQ(to_string(ErrorCode::kInternal), "internal");
}

}  // namespace
}  // namespace clowder
