/* A matching-list entry's handle. */
#ifndef RDMAPOST_TAG_HANDLE_H
#define RDMAPOST_TAG_HANDLE_H

#include "posting/inflight.h"

struct rp_tag_handle {
	PyObject_HEAD
	struct rp_in_flight *list; /* the tagged receives */
	uint64_t cookie, serial;
	uint32_t value; /* the device's number for the entry */
};

/* Return a new handle that names no entry yet, or NULL with an exception. */
PyObject *rp_make_tag_handle(struct rp_in_flight *list);

#endif
