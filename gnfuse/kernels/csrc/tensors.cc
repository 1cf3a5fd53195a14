// The sources that handle at::Tensor, as one translation unit: each takes 5 s by itself, nearly all of it for reading
// ATen's headers (`time` of the commands that `ninja -t commands` lists).
#include "arguments.cpp"
#include "constant.cpp"
#include "generator.cpp"
#include "operators.cpp"
