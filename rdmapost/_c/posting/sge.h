/* Creating SGEs, and getting the address and lkey of a region for them. */
#ifndef RDMAPOST_SGE_H
#define RDMAPOST_SGE_H

#include "posting/wr_types.h"

/* Make an SGE; `owner` is an MR, a buffer or None. Steals `lkey`, which may be NULL. */
PyObject *rp_make_sge(uint64_t addr, uint64_t length, PyObject *lkey, PyObject *owner);

/* Get the address and lkey for a region's SGEs; returns 0 if the region has no address. */
int rp_start_of_region(PyObject *mr, struct ibv_sge *sge);

#endif
