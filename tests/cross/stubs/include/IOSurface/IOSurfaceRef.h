// The name of IOSurface that metal-cpp uses.
#pragma once

typedef struct __IOSurface* IOSurfaceRef;
