// GPU evaluation of builds without a GPU backend.
#include <stdexcept>

#include "primitives.h"
