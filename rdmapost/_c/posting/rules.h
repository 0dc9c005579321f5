/* The rules of a post. */
#ifndef RDMAPOST_RULES_H
#define RDMAPOST_RULES_H

#include "posting/inflight.h"
#include "posting/read_wr.h"

/*
 * Pin the handles that a work request refers to, and check the work request; needs the queue's
 * lock. Returns whether the work request may be posted.
 */
int rp_check(const struct work_queue *q, struct rp_handle *owner, struct post *post,
	     struct request *r);

/* Like rp_check(), for a request whose handles are known to be open: it does not pin them. */
int rp_check_again(const struct work_queue *q, struct rp_handle *owner, struct post *post,
		   struct request *r);

/* The first address of an open region or a buffer, and its length. */
uint64_t rp_start_and_length(PyObject *owner, uint64_t *length);

/* The rule that a field's number breaks, regardless of the other fields; or NULL. */
const char *rp_rule_of_number(const struct work_queue *q, const struct wr_type *type,
			      const struct field *field, uint64_t number);

/* Like rp_pin_all(), but faster for a region; `in_use` is any handle of this process. */
static inline PyObject *rp_pin_refs(PyObject *refs, const struct rp_handle *in_use)
{
	struct rp_handle *handle = (struct rp_handle *)refs;

	if (!refs || !rp_has_type(refs, rp_known.mr))
		return rp_pin_all(refs);
	rp_pin(handle);
	return handle->process != in_use->process || RP_LOAD(&handle->word) & RP_SHUT ? refs : NULL;
}

#endif
