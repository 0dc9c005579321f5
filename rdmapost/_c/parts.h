/* The parts that module.c assembles into the module. */
#ifndef RDMAPOST_PARTS_H
#define RDMAPOST_PARTS_H

#include "attribute_offsets.h"

/* cffi's own init function (build_ffi.py renames it). */
PyObject *rp_cffi_init(void);

/* ---- methods of the resources (post.c, columns.c, sge.c, cq.c) ------------- */

/*
 * The slots in which a queue pair or SRQ keeps its queues, by verb (posting/post.h), and the slot in
 * which a CQ keeps its poller.
 */
RP_SHARED struct rp_slot rp_queue_slots[], rp_poller_slot;

PyObject *rp_post_send(PyObject *qp, PyObject *wrs);
PyObject *rp_post_recv(PyObject *qp, PyObject *wrs);
PyObject *rp_post_srq_recv(PyObject *srq, PyObject *wrs);
PyObject *rp_post_srq_ops(PyObject *srq, PyObject *wrs);
#define RP_COLUMNS(name) \
	PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
RP_COLUMNS(rp_post_columns);
RP_COLUMNS(rp_post_recv_columns);
RP_COLUMNS(rp_post_srq_recv_columns);
PyObject *rp_mr_blocks(PyObject *mr, PyObject *const *args, Py_ssize_t nargs);
PyObject *rp_mr_ranges(PyObject *mr, PyObject *const *args, Py_ssize_t nargs);
PyObject *rp_mr_getitem(PyObject *mr, PyObject *bounds);
PyObject *rp_poll_into(PyObject *cq, PyObject *buffer);

/* ---- functions of the module (comp_channel.c, dlpack.c) ------------------- */

PyObject *rp_get_cq_event(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *rp_read_dlpack(PyObject *self, PyObject *capsule);

/* ---- each adds a file's types and functions; 0, or -1 with an exception --- */

int rp_add_threads(void);
int rp_add_exceptions(void);
int rp_add_in_flight(PyObject *module);
int rp_add_wc(PyObject *module);
int rp_add_poller(PyObject *module);
int rp_add_wr_init(PyObject *module);
int rp_add_sge(PyObject *module);
int rp_add_handle(PyObject *module);
int rp_add_finalizer(PyObject *module);
int rp_add_buffer(PyObject *module);
int rp_add_tag_handle(PyObject *module);
int rp_add_wr_types(PyObject *module);
int rp_add_read_wr(void);
int rp_add_queue(PyObject *module);
int rp_add_prepared(PyObject *module);
int rp_add_columns(void);
int rp_add_soft_device(PyObject *module);
int rp_add_soft_journal(PyObject *module);
int rp_add_soft_queue_types(PyObject *module);
int rp_add_soft_faults(PyObject *module);
int rp_add_soft_fast_path(PyObject *module);
int rp_add_soft_transaction(PyObject *module);
int rp_add_soft_mapped_memory(PyObject *module);
int rp_add_roce_packets(PyObject *module);

#endif
