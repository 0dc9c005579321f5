/* The lock for data that verbs share with the soft device (data_lock.h). */
#include "handles/data_lock.h"

#ifdef Py_GIL_DISABLED
static PyMutex data_lock;
static uint64_t data_owner; /* the owning thread's mark, or 0 */
static int data_depth; /* times acquired */

void rp_data_lock(void)
{
	uint64_t me = rp_thread()->mark;

	if (RP_LOAD(&data_owner) != me) {
		PyMutex_Lock(&data_lock);
		RP_STORE(&data_owner, me);
	}
	data_depth++;
}

void rp_data_unlock(void)
{
	if (--data_depth)
		return;
	RP_STORE(&data_owner, 0);
	PyMutex_Unlock(&data_lock);
}

void rp_free_data_lock(void)
{
	data_lock = (PyMutex){ 0 };
	data_owner = 0;
	data_depth = 0;
}
#endif
