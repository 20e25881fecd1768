// Attention of few queries and of many: a source of its own, so that another core compiles it.

#include "prompt.h"
