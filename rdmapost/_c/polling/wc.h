/* Completions in Python. */
#ifndef RDMAPOST_WC_H
#define RDMAPOST_WC_H

#include "base.h"

/* A completion whose work request has been retired. It owns its references. */
struct rp_completion {
	struct rp_completion *next;
	struct ibv_wc wc;
	struct rp_wc_ex more;
	unsigned int has; /* which fields of `more` are valid: enum ibv_create_cq_wc_flags */
	PyObject *wr_id; /* the caller's, or NULL for the number in `wc` */
	PyObject *made; /* the WC, once created, else NULL */
};

/* Return a new WC, or NULL with an exception. */
PyObject *rp_make_wc(const struct rp_completion *completion);

/* Python's check_rows(): raises TypeError if the buffer holds pointers that Python follows. */
RP_SHARED PyObject *rp_check_rows;

/*
 * Export a buffer of whole rows; the caller must release it. Returns 0, or -1 with an exception.
 * The buffer's address is never NULL.
 */
int rp_get_rows(PyObject *buffer, Py_buffer *view);

/* Whether an object is a WC with all its fields, whatever their values. */
int rp_is_wc(PyObject *object);

#endif
