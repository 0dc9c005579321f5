/* Completions in Python. */
#ifndef RDMAPOST_WC_H
#define RDMAPOST_WC_H

#include "base.h"

/* A completion whose work request is retired; it owns its references. */
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

/* Whether an object is a WC with all its fields, whatever their values. */
int rp_is_wc(PyObject *object);

/* Raise VerbsError; returns NULL. */
PyObject *rp_raise_verbs(const char *verb, int code);

/* Raise WaitCancelled, which names the CQ. */
void rp_raise_cancelled(PyObject *cq);

#endif
