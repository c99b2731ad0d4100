// The names of CoreFoundation that metal-cpp uses.
#pragma once
#include <TargetConditionals.h>
#include <stddef.h>
#include <stdint.h>

typedef double CFTimeInterval;
typedef signed long CFIndex;
typedef const void* CFTypeRef;
typedef const struct __CFString* CFStringRef;
typedef const struct __CFDictionary* CFDictionaryRef;
