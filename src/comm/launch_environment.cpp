#include "comm/launch_environment.h"
