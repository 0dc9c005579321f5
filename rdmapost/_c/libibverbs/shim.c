/*
 * The shim: real symbols for six functions that the header defines as static inline, such as
 * ibv_post_send and ibv_poll_cq.
 *
 * Each calls the header's own inline, so only the header depends on the ABI of the context's ops
 * table. shim.h gives the six default visibility; everything else in the module is hidden.
 */
#include "libibverbs/shim.h"

#define DEFINE(name, parameters, arguments)                                    \
	int name parameters                                                    \
	{                                                                      \
		return header_##name arguments;                                \
	}
RP_SHIM(DEFINE)
