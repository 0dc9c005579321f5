/* Posting sends to a queue pair with send_ops_flags. */
#ifndef RDMAPOST_BUILD_WR_H
#define RDMAPOST_BUILD_WR_H

#include "posting/submit.h"

struct outcome rp_build(void *qp, struct ibv_send_wr *wr);

#endif
